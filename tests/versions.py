"""Names that JAX has moved since the oldest version that the library supports."""

import jax

if hasattr(jax, "enable_x64"):
    enable_x64 = jax.enable_x64
else:  # Before jax 0.8.0.
    from jax.experimental import enable_x64  # noqa: F401

if hasattr(jax.monitoring, "unregister_event_duration_listener"):
    unregister_event_duration_listener = jax.monitoring.unregister_event_duration_listener
else:  # Before jax 0.8.1.
    from jax._src.monitoring import (
        _unregister_event_duration_listener_by_callback as unregister_event_duration_listener,  # noqa: F401
    )
