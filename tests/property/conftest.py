"""Settings of hypothesis: the same cases in every run, and nothing written."""

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "fast",
    max_examples=2,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    # Each attempt to make a case smaller is compiled.
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
settings.register_profile(
    "slow",
    settings.get_profile("fast"),
    max_examples=30,
    phases=(Phase.generate, Phase.shrink),
)
settings.load_profile("fast")
