"""Four models as others write them, with random-feature attention by one documented line each."""
