"""The arguments of attention: layout, masks, and mesh axes that shard the length."""
