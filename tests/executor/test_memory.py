import pytest
import torch

from octavo.executor.machine.memory import total_bytes, usable_bytes, used_bytes
from octavo.executor.models.kv_caches import allocate_kv_caches, block_bytes
from octavo.executor.start.pool import refuse_too_large, size_pool
from octavo.protocol.config import Config
from tests.fakes.system_files import write

CPU = torch.device("cpu")
GIB = 1 << 30


def meminfo(available_kib):
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {available_kib} kB\n"}


def test_a_block_counts_keys_and_values_of_every_layer():
    assert block_bytes([(3, 64, 64)] * 30, 16, torch.bfloat16) == 30 * 2 * 3 * 64 * 16 * 2
    assert block_bytes([(1, 192, 128), (2, 8, 8)], 1, torch.float32) == (192 + 128 + 32) * 4


def test_the_size_that_is_set_is_taken():
    config = Config(kv_cache_memory_bytes=1000, block_size=4, max_num_seqs=1)
    assert size_pool(config, 90, 16, CPU) == (11, 90)


def test_otherwise_a_share_of_what_may_be_used(tmp_path):
    write(tmp_path, meminfo(GIB // 1024))
    size = size_pool(Config(), 1000, 100, CPU, tmp_path)
    assert size.num_blocks == 128 * 7  # no more than max_num_seqs sequences of max_model_len can fill
    assert (
        size_pool(Config(), 1 << 20, 1000, CPU, tmp_path).num_blocks == int(GIB * 0.4) >> 20
    )  # the share that the help states
    shared = size_pool(Config(), 1 << 20, 400, CPU, tmp_path, num_sharing=3)
    assert shared.num_blocks == int(GIB * 0.4) // 3 >> 20


def test_no_room_for_one_sequence_names_the_numbers_and_the_flags():
    config = Config(kv_cache_memory_bytes=1050, block_size=16)
    with pytest.raises(ValueError, match=r"100 tokens") as caught:
        size_pool(config, 300, 100, CPU)
    message = str(caught.value)
    assert "2100 bytes" in message  # needed: 7 blocks
    assert "1050" in message
    assert "--max-model-len to 48" in message
    assert "--kv-cache-memory-bytes to 2100" in message
    assert size_pool(config, 300, 48, CPU).num_blocks == 3


def test_what_makes_room_depends_on_where_the_cache_is(tmp_path):
    write(tmp_path, meminfo(1))
    with pytest.raises(ValueError, match=r"room for 409: set --kv-cache-memory-bytes to 3000 or more \(the default is"):
        size_pool(Config(block_size=4), 1000, 12, CPU, tmp_path)


def test_weights_that_cannot_be_held_are_refused_with_what_helps(tmp_path):
    write(tmp_path, meminfo(GIB // 1024))
    refuse_too_large(Config(), GIB, CPU, tmp_path)
    with pytest.raises(ValueError, match=r"take 1\.5 GiB, and 1\.0 GiB of this machine's memory are free: .*--quantiz"):
        refuse_too_large(Config(), 3 * GIB // 2, CPU, tmp_path)
    with pytest.raises(ValueError, match=r"and 0\.5 GiB"):
        refuse_too_large(Config(), GIB, CPU, tmp_path, num_sharing=2)
    refuse_too_large(Config(), 99 * GIB, CPU, tmp_path / "untold")


def test_what_this_process_holds_and_of_how_much(tmp_path):
    system = {**meminfo(1), "proc/self/status": "Name:\tpython\nVmPeak:\t   900 kB\nVmRSS:\t   123 kB\nThreads:\t4\n"}
    write(tmp_path, system)
    assert (used_bytes(CPU, tmp_path), total_bytes(CPU, tmp_path)) == (123 * 1024, 99999999 * 1024)
    write(tmp_path, {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"})
    assert total_bytes(CPU, tmp_path) == 99999999 * 1024
    write(tmp_path, {"sys/fs/cgroup/a/memory.max": f"{GIB}\n"})
    assert total_bytes(CPU, tmp_path) == GIB


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ({}, 8 * GIB),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 8 * GIB),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/jobs/one\n",
                "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes": f"{1 << 62}\n",
                "sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes": "5\n",
                "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes": f"{3 * GIB}\n",
                "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes": f"{2 * GIB}\n",
            },
            GIB,
        ),
        (  # over its limit: nothing, not less than nothing
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{GIB}\n",
                "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
            },
            0,
        ),
    ],
)
def test_control_groups_limit_what_may_be_used(group, expected, tmp_path):
    assert usable_bytes(write(tmp_path, meminfo(8 * GIB // 1024) | group)) == expected


def test_a_system_that_does_not_tell_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="--kv-cache-memory-bytes"):
        usable_bytes(tmp_path)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_the_pool_is_zero_and_takes_memory_only_where_it_is_written():
    before = resident_bytes()
    kv_caches = allocate_kv_caches([(2, 64, 32)] * 2, 1 << 20, 4, torch.bfloat16, CPU)
    k_cache_NKDP, v_cache_NKPD = kv_caches[1]
    assert (k_cache_NKDP.shape, v_cache_NKPD.shape) == ((1 << 20, 2, 64, 4), (1 << 20, 2, 4, 32))
    assert k_cache_NKDP.dtype == torch.bfloat16
    k_cache_NKDP[5] = 1.0
    assert k_cache_NKDP[4:7].sum() == 512
    assert resident_bytes() - before < 64 << 20  # of 3 GiB
