"""Compilation for a GPU that this machine need not have, and what the compiled program costs.

XLA compiles for a description of the GPU, with the plugin and the tools of CUDA alone. Without the
GPU it measures no tiles of its matrix products, so that launches, fusions and traffic mean
something, and times do not.
"""

import collections
import re
from typing import NamedTuple

import jax
from jax.experimental import topologies

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f32": 4, "s32": 4, "u32": 4, "u64": 8}
ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.-]+) = (.*?) ([a-z][a-z-]*)\((.*)$")
# Operations that launch nothing.
NOTHING = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element")

Instruction = collections.namedtuple("Instruction", "name type operation rest is_root")
Cost = collections.namedtuple("Cost", "launches bytes")


class Gpu(NamedTuple):
    """Numbers of a GPU's data sheet that XLA asks for.

    Attributes:
      capability: Major and minor compute capability.
      cores: Number of multiprocessors.
      clock: GHz.
      bandwidth: Bytes per second.
      cache: Bytes of the second-level cache.
      memory: Bytes of the device.
      shared: Bytes of shared memory of a multiprocessor, of which a program may take 1 KiB less.
      threads: Most threads of a multiprocessor.
      fpus: Units for float32 of a multiprocessor.
    """

    capability: tuple[int, int]
    cores: int
    clock: float
    bandwidth: float
    cache: int
    memory: int
    shared: int
    threads: int = 2048
    fpus: int = 128

    def description(self, name):
        """Returns XLA's description of the GPU, in the text format of protocol buffers."""
        major, minor = self.capability
        feature = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
              shared_memory_per_block_optin: {self.shared - 1024}
              threads_per_core_limit: {self.threads} core_count: {self.cores}
              fpus_per_core: {self.fpus}
              block_dim_limit_x: {2**31 - 1} block_dim_limit_y: 65535 block_dim_limit_z: 65535
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.cache}
              clock_rate_ghz: {self.clock} device_memory_size: {self.memory}
              cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              device_address_bits: 64 name: "NVIDIA {name}" model_str: "{name}"
              device_vendor: "NVIDIA Corporation" platform_version: "{major}.{minor}"
              driver_version: "13.0.0" runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            device_description_str: "NVIDIA {name}"
        """


GPUS = {
    "H200": Gpu((9, 0), 132, 1.98, 4.8e12, 50 * 2**20, 141 * 10**9, 228 * 2**10),
    "A100": Gpu((8, 0), 108, 1.41, 2.0e12, 40 * 2**20, 80 * 10**9, 164 * 2**10, fpus=64),
    "T4": Gpu((7, 5), 40, 1.59, 0.32e12, 4 * 2**20, 16 * 10**9, 64 * 2**10, 1024, 64),
}


def compile_for(name, function, *arguments):
    """Compiles a function of abstract arguments for one of ``GPUS``."""
    description = topologies.get_topology_desc(
        platform="cuda", target_config=GPUS[name].description(name), topology="1x1x1"
    )
    mesh = topologies.make_mesh(topo=description, mesh_shape=(1,), axis_names=("x",))
    sharding = jax.NamedSharding(mesh, jax.P())

    def on_device(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.jit(function).lower(*jax.tree.map(on_device, arguments)).compile()


def cost_of(program):
    """Returns the launches of a compiled program, and the bytes that they read and write.

    A launch reads its operands and writes its result. A fusion that only takes slices of an operand
    reads these, and one that updates part of an array in place writes the part. The body of a
    counted loop runs as often as the loop iterates. Of a conditional, the cheapest branch counts.
    What runs asynchronously counts where it starts.

    Args:
      program: The text of an optimized HLO module.
    """
    computations, name, entry = {}, None, None
    for line in program.splitlines():
        if found := COMPUTATION.match(line):
            name = found[2]
            computations[name] = []
            entry = name if found[1] else entry
        elif name and (found := INSTRUCTION.match(line)):
            computations[name].append(Instruction(*found.groups()[1:], bool(found[1])))
    return _cost(computations, entry)


def _cost(computations, name):
    types = {instruction.name: instruction.type for instruction in computations[name]}
    total = Cost(0, 0)
    for instruction in computations[name]:
        rest = instruction.rest
        if instruction.operation in NOTHING or instruction.operation.endswith("-done"):
            continue
        if instruction.operation == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
            body = _cost(computations, re.search(r"body=%([\w.-]+)", rest)[1])
            trips = int(trips[1]) if trips else 1
            total = Cost(total.launches + trips * body.launches, total.bytes + trips * body.bytes)
            continue
        if instruction.operation in ("call", "conditional"):
            names = re.findall(r"to_apply=%([\w.-]+)|_computation=%([\w.-]+)", rest)
            if listed := re.search(r"branch_computations=\{(.*?)\}", rest):
                names = re.findall(r"()%([\w.-]+)", listed[1])
            cost = min((_cost(computations, a or b) for a, b in names), key=lambda cost: cost.bytes)
            total = Cost(total.launches + cost.launches, total.bytes + cost.bytes)
            continue
        called = re.search(r"calls=%([\w.-]+)", rest)
        if instruction.operation in ("fusion", "fusion-start"):
            size = _bytes_of_fusion(computations[called[1]])
        else:
            size = _bytes(instruction.type)
            size += sum(_bytes(types.get(operand, "")) for operand in _operands(instruction))
        total = Cost(total.launches + 1, total.bytes + size)
    return total


def _bytes_of_fusion(computation):
    by_name = {instruction.name: instruction for instruction in computation}

    def source(name):
        instruction = by_name.get(name)
        if instruction is not None and instruction.operation == "bitcast":
            return source(_operands(instruction)[0])
        return name

    users = collections.defaultdict(list)
    for instruction in computation:
        if instruction.operation != "bitcast":
            for place, operand in enumerate(_operands(instruction)):
                users[source(operand)].append((instruction, place))

    def read(parameter):
        uses = {(user.operation, place) for user, place in users[parameter.name]}
        if uses <= {("dynamic-slice", 0), ("slice", 0)}:
            return sum(_bytes(user.type) for user, _ in users[parameter.name])
        return 0 if uses == {("dynamic-update-slice", 0)} else _bytes(parameter.type)

    def written(name):
        instruction = by_name[source(name)]
        operands = _operands(instruction)
        if instruction.operation == "dynamic-update-slice":
            return _bytes(by_name[operands[1]].type)
        if instruction.operation == "tuple":
            return sum(map(written, operands))
        return _bytes(instruction.type)

    parameters = [x for x in computation if x.operation == "parameter"]
    [root] = [x.name for x in computation if x.is_root]
    return sum(map(read, parameters)) + written(root)


def _operands(instruction):
    return re.findall(r"%([\w.-]+)", instruction.rest.split("), ")[0])


def _bytes(type_):
    total = 0
    for dtype, sizes in ARRAY.findall(type_):
        number = BYTES[dtype]
        for size in filter(None, sizes.split(",")):
            number *= int(size)
        total += number
    return total


def kernels(folder):
    """Returns what ptxas and the disassembler say about the Mosaic kernels dumped to a folder.

    Returns:
      For each kernel: registers of a thread at its start, bytes of spilled registers and of shared
      memory, and numbers of matrix products (HGMMA).
    """
    rows = []
    for path in sorted(folder.glob("*.ptxas"), key=lambda path: path.stat().st_mtime_ns):
        report = path.read_text()
        resources = path.with_suffix(".resources.txt").read_text()
        assembly = path.with_suffix(".sass_ctrl").read_text()
        rows.append(
            {
                "kernel": path.stem.rpartition("_")[0],
                "registers": int(re.search(r"Used (\d+) registers", report)[1]),
                "spilled": int(re.search(r"(\d+) bytes spill stores", report)[1]),
                "shared": int(re.search(r"smem_scratch_bytes=(\d+)", resources)[1]),
                "products": len(re.findall(r"\bHGMMA\.", assembly)),
            }
        )
    return rows
