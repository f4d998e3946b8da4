"""Settings of hypothesis, which draws the same cases in every run and writes no files."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fast",
    max_examples=8,
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("slow", settings.get_profile("fast"), max_examples=30)
settings.load_profile("fast")
