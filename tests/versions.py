"""Names that JAX has moved since the oldest version that the library supports."""

import jax
import jax.experimental

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
    unregister_event_duration_listener = jax.monitoring.unregister_event_duration_listener
else:  # Before jax 0.8.
    from jax._src import monitoring

    enable_x64 = jax.experimental.enable_x64
    unregister_event_duration_listener = monitoring._unregister_event_duration_listener_by_callback
