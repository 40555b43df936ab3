"""What a decode step costs the scheduler: that the whole of it is done, and told."""

import argparse
from pathlib import Path

import msgspec

from octavo.bench.scheduler import PARTS, TOTALS, describe, open_rig


def test_it_tells_every_part_after_each_number_of_finished_requests(tmp_path: Path, capsys) -> None:
    parser = argparse.ArgumentParser()
    describe(parser)
    file = tmp_path / "results.json"
    flags = vars(parser.parse_args(f"--num-seqs 4 --context 40 --steps 5 --finished 9 0 --json {file}".split()))
    assert flags.pop("run")(flags) == 0
    results = msgspec.json.decode(file.read_bytes())
    assert [row["num_finished"] for row in results["rows"]] == [0, 9]
    assert all(list(row["ms"]) == [*PARTS, *TOTALS] for row in results["rows"])
    assert (results["bench"], results["flags"]["context"]) == ("scheduler", 40)
    assert results["place"]["cpu"]
    assert "| 9 |" in capsys.readouterr().out


def test_each_step_brings_the_gateway_one_token_of_every_sequence() -> None:
    with open_rig(num_seqs=3, context=20, block_size=16, num_steps=10, num_finished=0) as rig:
        before = dict(rig.num_received)
        times = rig.run(6)
        assert rig.num_received == {request_id: count + 6 for request_id, count in before.items()}
        assert len(before) == 3
        assert {len(values) for values in times.values()} == {6}
