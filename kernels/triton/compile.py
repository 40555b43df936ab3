"""Compile every kernel ahead of time, as it is shipped, for GPUs that this machine need not have.

    python -m octavo.kernels.triton.compile [--jobs N] [--complete]

prints what each kernel takes of each GPU: registers of a thread, shared memory, and spills, which are bytes on NVIDIA's
and registers on AMD's. The exit status is 1 if a kernel spills or does not fit. The results are kept in
TRITON_CACHE_DIR, or else in the user's cache, so that the next run takes seconds.

The forms that most models need are compiled. `--complete` adds attention in every combination of dtype, head size and
changed scores, which takes several times as long. Other forms are compiled when they are launched, with tiles chosen by
the same rules, and are not measured: head sizes in between (padded to the same powers of two), blocks of other than 16
tokens, norms of other sizes, products with a bias or with other groups, norms and products in float32.
"""

import argparse
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.triton import activations, attention, drawing, edits, groupwise, kv, masks, norms, sampling
from octavo.kernels.triton.configuration import Configuration
from octavo.kernels.user_cache import user_cache

MODULES = (kv, attention, norms, activations, groupwise, sampling, drawing, edits, masks)
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Target:
    gpu: GPUTarget
    max_shared_bytes: int  # of one program
    has_float8: bool  # instructions for float8_e4m3fn


# Shared memory: CUDA C++ Programming Guide, "Compute Capabilities"; AMD CDNA 3 ISA, "LDS".
TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 163 * 1024, False),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 227 * 1024, True),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 227 * 1024, True),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 64 * 1024, True),
}


@dataclass(frozen=True, slots=True)
class Usage:
    """What a kernel takes of a GPU."""

    registers: int  # of a thread
    shared_bytes: int  # of a program
    spills: int  # bytes stored and loaded on NVIDIA's GPUs, registers on AMD's


def configurations(is_complete: bool = False) -> Iterator[Configuration]:
    """Yield all kernels of this backend, as they are shipped."""
    for module in MODULES:
        yield from attention.configurations(is_complete) if module is attention else module.configurations()


def shipped(is_complete: bool = False) -> list[tuple[Configuration, str]]:
    """Return each kernel with each target that it is for."""
    return [
        (configuration, name)
        for configuration in configurations(is_complete)
        for name, target in TARGETS.items()
        if target.has_float8 or "*fp8e4nv" not in configuration.signature.values()
    ]


def cache_directory() -> Path:
    """Return where compiled kernels are kept: TRITON_CACHE_DIR, or a folder in the user's cache."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or user_cache() / "octavo" / "triton")


def compile_configuration(configuration: Configuration, target: Target) -> Usage:
    """Compile the kernel and return what it takes, or return what an earlier run found."""
    source = _source(configuration)
    options = {"num_warps": configuration.num_warps, "num_stages": configuration.num_stages}
    kept = cache_directory() / "usage" / f"{_digest(source, target, options)}.json"
    if kept.exists():
        return Usage(**json.loads(kept.read_text()))
    # The kernel is compiled even if Triton's own cache has it: ptxas says what it takes only while it runs.
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope(), redirect_stdout(io.StringIO()) as log:
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=target.gpu, options=options)
    if target.gpu.backend == "cuda":
        usage = _usage_on_nvidia(log.getvalue(), compiled.metadata.shared)
    else:
        usage = _usage_on_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    kept.parent.mkdir(parents=True, exist_ok=True)
    partial = kept.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(asdict(usage)))
    partial.replace(kept)
    return usage


def misfits(usages: dict[tuple[str, str], Usage]) -> list[str]:
    """Return what is wrong with kernels that spill or take more shared memory than their target has."""
    wrong = []
    for (name, target), usage in usages.items():
        if usage.spills:
            wrong.append(f"{name} spills {usage.spills} on {target}")
        if usage.shared_bytes > TARGETS[target].max_shared_bytes:
            wrong.append(f"{name} takes {usage.shared_bytes} bytes of shared memory on {target}")
    return wrong


def table(usages: dict[tuple[str, str], Usage]) -> str:
    """Return one line a kernel and target."""
    width = max(len(name) for name, _ in usages)
    lines = [f"{'kernel':{width}}  {'target':6}  {'registers':>9}  {'shared KiB':>10}  {'spills':>6}"]
    for (name, target), usage in usages.items():
        shared_kib = usage.shared_bytes / 1024
        lines.append(f"{name:{width}}  {target:6}  {usage.registers:9}  {shared_kib:10.1f}  {usage.spills:6}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m octavo.kernels.triton.compile", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile")
    parser.add_argument("--complete", action="store_true", help="attention in every combination of its forms")
    options = parser.parse_args(arguments)
    if triton.knobs.runtime.interpret:
        parser.error("with TRITON_INTERPRET=1 kernels are interpreted, not compiled: unset it")
    usages = _compile_all(options.jobs, options.complete)
    print(table(usages))
    wrong = misfits(usages)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def _compile_all(jobs: int, is_complete: bool) -> dict[tuple[str, str], Usage]:
    keys = [(configuration.name, target) for configuration, target in shipped(is_complete)]
    # Spawned, not forked: threads of torch and Numba would not live on in a fork.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare_process) as pool:
        futures = [pool.submit(_compile_numbered, number, is_complete) for number in range(len(keys))]
        for future in tqdm(as_completed(futures), total=len(futures), desc="Compiling", unit="kernel"):
            future.result()  # a kernel that does not compile ends the run here
        return {key: future.result() for key, future in zip(keys, futures, strict=True)}


def _prepare_process() -> None:
    triton.knobs.cache.dir = str(cache_directory())
    for configuration in configurations():
        _ = configuration.kernel.cache_key  # Triton's key depends on the keys made before: so all are made in one order


def _compile_numbered(number: int, is_complete: bool) -> Usage:
    """Compile in a process of the pool; kernels cannot be sent to one, their numbers can."""
    configuration, target = shipped(is_complete)[number]
    return compile_configuration(configuration, TARGETS[target])


def _source(configuration: Configuration) -> ASTSource:
    names = configuration.kernel.arg_names
    types = {name: configuration.signature.get(name, "constexpr") for name in names}
    divisible = [index for index, name in enumerate(names) if types[name].startswith("*") or ":16" in types[name]]
    return ASTSource(
        configuration.kernel,
        {name: kind.removesuffix(":16") for name, kind in types.items()},
        configuration.constexprs,
        {(index,): DIVISIBLE_BY_16 for index in divisible},
    )


def _digest(source: ASTSource, target: Target, options: dict[str, int]) -> str:
    """Return a name for a compilation: the kernel with all that it calls, its types, constants, target and options."""
    parts = (source.hash(), target.gpu, options, triton.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _usage_on_nvidia(log: str, shared_bytes: int) -> Usage:
    """Return what `ptxas -v` said when Triton ran it."""
    spills = sum(_number(rf"(\d+) bytes spill {kind}", log) for kind in ("stores", "loads"))
    return Usage(_number(r"Used (\d+) registers", log), shared_bytes, spills)


def _usage_on_amd(assembly: str, shared_bytes: int) -> Usage:
    """Return what the metadata at the end of a kernel's assembly say."""
    spills = sum(_number(rf"\.{kind}_spill_count:\s+(\d+)", assembly) for kind in ("vgpr", "sgpr"))
    return Usage(_number(r"\.vgpr_count:\s+(\d+)", assembly), shared_bytes, spills)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"the compiler's output has nothing like {pattern!r}: {text[-500:]}")
    return int(found[1])


if __name__ == "__main__":
    sys.exit(main())
