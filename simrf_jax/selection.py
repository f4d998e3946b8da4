"""Feature map, coupling and number of features that reach an error on a user's queries and keys.

``attention_error`` predicts the error of the output of attention from the closed forms of
``simrf_jax.theory``. ``choose_num_features`` also draws projections and fits calibrations, and
measures their errors, where the prediction fails. ``required_features`` is a bound that needs only
covariances.
"""

from simrf_jax._src.selection.choice import choose_num_features, required_features
from simrf_jax._src.selection.prediction import attention_error

__all__ = ["attention_error", "choose_num_features", "required_features"]
