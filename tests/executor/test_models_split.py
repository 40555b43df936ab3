"""Among how many ranks a model can be split, told before anything is loaded."""

import msgspec
import pytest

from octavo.executor.models import read_model_config
from octavo.executor.models.split import check_size, num_kv_heads_of_rank, possible_sizes
from tests.fakes.checkpoints import TINY

MODELS = [  # attention heads, KV heads, intermediate size; the sizes up to 16 that can be
    (9, 3, 1536, [1, 3]),  # the demo: 9 does not divide 1536
    (4, 2, 96, [1, 2, 4]),
    (32, 8, 14336, [1, 2, 4, 8, 16]),
    (28, 4, 18944, [1, 2, 4]),  # 7 and 14 divide the heads; the KV heads can neither be divided nor repeated for them
    (14, 2, 4864, [1, 2]),
    (12, 12, 96, [1, 2, 3, 4, 6, 12]),
    (16, 1, 96, [1, 2, 4, 8, 16]),  # one KV head, which every rank holds
    (7, 7, 96, [1]),
]


def config_of(tmp_path, num_heads, num_kv_heads, intermediate_size):
    keys = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": 16}
    keys |= {"architectures": ["LlamaForCausalLM"], "intermediate_size": intermediate_size}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(TINY | keys))
    return read_model_config(tmp_path)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "intermediate_size", "sizes"), MODELS)
def test_the_sizes_that_can_be(tmp_path, num_heads, num_kv_heads, intermediate_size, sizes):
    config = config_of(tmp_path, num_heads, num_kv_heads, intermediate_size)
    assert possible_sizes(config) == sizes
    for size in sizes:
        check_size(config, size)


@pytest.mark.parametrize(
    ("model", "size", "said"),
    [
        ((9, 3, 1536), 2, "cannot be 2: it does not divide the model's 9 attention heads; .* among 1 or 3$"),
        ((9, 3, 1536), 9, "cannot be 9: it does not divide the model's 1536 intermediate features; .* among 1 or 3$"),
        ((28, 4, 18944 * 7), 7, r"num_key_value_heads \(4\) cannot be divided among 7 ranks; .* among 1, 2 or 4$"),
        ((7, 7, 96), 7, "7: it does not divide the model's 96 intermediate features; .* among 1$"),
    ],
)
def test_another_is_refused_and_names_them(tmp_path, model, size, said):
    with pytest.raises(ValueError, match=said):
        check_size(config_of(tmp_path, *model), size)


@pytest.mark.parametrize(("num_kv_heads", "world_size", "expected"), [(8, 2, 4), (3, 3, 1), (2, 4, 1), (1, 6, 1)])
def test_kv_heads_are_divided_or_held_several_times(num_kv_heads, world_size, expected):
    assert num_kv_heads_of_rank(num_kv_heads, world_size) == expected
