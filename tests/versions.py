"""Names that JAX has moved since the oldest version that the library supports."""

import jax
import jax.experimental

# jax 0.7 has it in jax.experimental alone, where later versions warn of it.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64
