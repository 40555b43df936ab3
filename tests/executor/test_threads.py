import pytest

from octavo.executor.machine.threads import choose_num_threads, count_cores, cpu_quota
from tests.fakes.system_files import write


def topology(pairs):
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{names}\n" for cpu, names in pairs.items()
    }


FOUR_CORES = topology({0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"})


def test_hardware_threads_of_one_core_count_once(tmp_path):
    write(tmp_path, FOUR_CORES)
    assert choose_num_threads(affinity=range(8), root=tmp_path)[0] == 4
    assert count_cores({0, 4}, tmp_path) == 1
    assert count_cores({0, 1, 6}, tmp_path) == 3


def test_without_a_topology_each_cpu_is_a_core(tmp_path):
    assert choose_num_threads(affinity={0, 3, 8}, root=tmp_path)[0] == 3


@pytest.mark.parametrize(("num_sharing", "expected"), [(1, 4), (2, 2), (3, 1), (9, 1)])
def test_executors_of_one_machine_divide_the_cores(num_sharing, expected, tmp_path):
    root = write(tmp_path, FOUR_CORES)
    assert choose_num_threads(affinity=range(8), root=root, num_sharing=num_sharing)[0] == expected
    assert choose_num_threads(7, affinity=range(8), root=root, num_sharing=num_sharing)[0] == 7


def test_what_is_set_wins(tmp_path):
    assert choose_num_threads(7, affinity={0}, root=tmp_path) == (7, "as set by num_threads")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n"}, 1.5),
        # the parent's limit holds for the child
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
            },
            3.0,
        ),
        # in a container: the path is the host's, the mount shows the container's own group
        ({"proc/self/cgroup": "0::/docker/xyz\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/jobs\n2:memory:/\n",
                "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/jobs/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
)
def test_quota_of_control_groups(files, expected, tmp_path):
    assert cpu_quota(write(tmp_path, files)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(50_000, 1), (150_000, 1), (200_000, 2), (399_000, 3), (900_000, 4)])
def test_the_quota_is_rounded_down_to_one_at_least(quota, expected, tmp_path):
    group = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    num_threads, reason = choose_num_threads(affinity=range(8), root=write(tmp_path, FOUR_CORES | group))
    assert num_threads == expected
    assert ("quota" in reason) == (expected < 4)


def test_this_machine_has_a_core():
    assert choose_num_threads()[0] >= 1
