# Numba infers the types.
# mypy: allow-untyped-defs, allow-untyped-calls
"""Threads that do one program together: who takes part, and where they meet.

OpenMP may give fewer threads than were asked for, or wake one late. So the team is whoever has come when its first
member (number 0, the leader) has waited long enough; from then on it is closed, and each of its members is running.
A barrier among them cannot wait for somebody who never comes.

`team` is the address of TEAM_SIZE int64 zeros; its places lie in cache lines of their own.
"""

from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from octavo.kernels.cpu.jit import routine

PATIENCE_NS = 2_000_000  # for which the leader waits; a sleeping thread is there within 0.1 ms
SPINS = 100  # looks at memory, some 3 us, before a waiting thread lets others have its core

_COME, _MEMBERS, _MET, _MEETINGS = 0, 16, 32, 48  # places in `team`
TEAM_SIZE = 64
_CLOSED = 2**32  # is added to _COME when the team is closed

_INT32, _INT64 = ir.IntType(32), ir.IntType(64)
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", []), "aarch64": ("llvm.aarch64.hint", [ir.Constant(_INT32, 1)])}
_PAUSE, _PAUSE_ARGUMENTS = _PAUSES.get(binding.get_process_triple().split("-")[0], ("", []))


def _element(builder: ir.IRBuilder, memory: ir.Value, index: ir.Value) -> ir.Value:
    return builder.gep(builder.inttoptr(memory, _INT64.as_pointer()), [index])


@intrinsic
def _fetch_add(typingctx, memory, index, amount):
    """Atomically add to an int64 in memory; return what was there. Orders what is before it and after it."""

    def generate(context, builder, signature, args):
        memory, index, amount = args
        return builder.atomic_rmw("add", _element(builder, memory, index), amount, "acq_rel")

    return types.int64(types.int64, types.int64, types.int64), generate


@intrinsic
def _load(typingctx, memory, index):
    """Return an int64 in memory; what its writer did before is visible from here on."""

    def generate(context, builder, signature, args):
        return builder.load_atomic(_element(builder, *args), "acquire", 8)

    return types.int64(types.int64, types.int64), generate


@intrinsic
def publish(typingctx, memory, index, value):
    """Write an int64 in memory after all that this thread did before."""

    def generate(context, builder, signature, args):
        memory, index, value = args
        builder.store_atomic(value, _element(builder, memory, index), "release", 8)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), generate


@intrinsic
def _pause(typingctx):
    """Tell the core that this thread waits for memory to change."""

    def generate(context, builder, signature, args):
        if _PAUSE:
            kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in _PAUSE_ARGUMENTS])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, _PAUSE), _PAUSE_ARGUMENTS)
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def _yield_core(typingctx):
    """Let another thread have this core."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(_INT32, [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def now_ns(typingctx):
    """Return the monotonic clock."""

    def generate(context, builder, signature, args):
        time = cgutils.alloca_once(builder, ir.ArrayType(_INT64, 2))  # seconds, nanoseconds
        kind = ir.FunctionType(_INT32, [_INT32, time.type])
        read = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        builder.call(read, [ir.Constant(_INT32, 1), time])
        seconds, rest = (builder.extract_value(builder.load(time), part) for part in (0, 1))
        return builder.add(builder.mul(seconds, ir.Constant(_INT64, 10**9)), rest)

    return types.int64(), generate


@routine()
def _wait_a_little(num_waits):
    if num_waits < SPINS:
        _pause()
    else:
        _yield_core()


@routine()
def join(team, num_expected):
    """Return this thread's number in the team, or -1: it has come too late and is to do nothing."""
    number = _fetch_add(team, _COME, 1)
    num_waits = 0
    if number == 0:
        end_ns = now_ns() + PATIENCE_NS
        while _load(team, _COME) < num_expected and now_ns() < end_ns:
            _wait_a_little(num_waits)
            num_waits += 1
        publish(team, _MEMBERS, _fetch_add(team, _COME, _CLOSED))
    elif number >= _CLOSED:
        return -1
    while _load(team, _MEMBERS) == 0:
        _wait_a_little(num_waits)
        num_waits += 1
    return number


@routine()
def num_members(team):
    """Return the size of the team that this thread has joined."""
    return _load(team, _MEMBERS)


@routine()
def meet(team, num_members):
    """Wait until all members are here; each then sees what the others did before."""
    if num_members == 1:
        return
    meeting = _load(team, _MEETINGS)
    if _fetch_add(team, _MET, 1) == num_members - 1:
        publish(team, _MET, 0)
        publish(team, _MEETINGS, meeting + 1)
        return
    num_waits = 0
    while _load(team, _MEETINGS) == meeting:
        _wait_a_little(num_waits)
        num_waits += 1
