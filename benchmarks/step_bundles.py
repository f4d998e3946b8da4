"""The bundles of a training step on one device, a number for ``benchmarks.pod_compile``.

The compiler writes the schedules of a process's programs if that is asked for before it is loaded,
and takes minutes and gigabytes longer. So each step is compiled here once more, in a process that
prints one number.

Run: python -m benchmarks.step_bundles v5e:16x16:none:scanned exact
"""

from benchmarks import command_line, pod_compile, pods, schedule, tpu


def count(pod, attention):
    """Returns the bundles of all operations and kernels of a step of ``experiments/vit``."""
    config, built = pod_compile.build(pod, attention)
    compiled = pod_compile.trace_step(config, built).lower().compile()
    bundles = schedule.operation_bundles(tpu.executed(compiled.as_text()))
    if attention.endswith(pods.IN_KERNELS):
        # A program of a kernel takes all heads of one image.
        names = ("random_feature_attention", "random_feature_attention_gradient")
        programs = config.batch_size // pod.num_devices * config.model.depth
        bundles += programs * sum(schedule.bundles(name, steps=1) for name in names)
    return bundles


def main():
    """Prints the number."""
    parser = command_line.parser(__doc__)
    parser.add_argument("pod", type=pods.Pod.parse, metavar="TOPOLOGY:REMAT:LAYERS")
    parser.add_argument("attention", help="such as 'exact', or 'simplex in kernels'")
    options = parser.parse_args()
    schedule.record()
    print(count(options.pod, options.attention))


if __name__ == "__main__":
    main()
