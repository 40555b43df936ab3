"""What transformers says about a checkpoint's architecture, and what its modelling code does when it is looked at."""

import copy
import logging
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from octavo.executor.models.borrowed import attention
from octavo.executor.models.borrowed.attention import PROBE_TOKENS, AttentionLayer, UnsupportedModelError
from octavo.executor.models.borrowed.notices import quiet
from octavo.executor.models.borrowed.rotary import make_rotary_static, rotary_frequencies, stretched_tokens
from octavo.executor.models.config import unsaid_dtype
from octavo.executor.models.kv_caches import KVShape
from octavo.executor.models.rotary import without_effect
from octavo.executor.quantization import Quantization, read_quantization

logger = logging.getLogger(__name__)

AUTO_CLASS = "AutoModelForCausalLM"
WIDENED = {"mxfp4": transformers.Mxfp4Config(dequantize=True)}
READ_METHODS = ("awq", "gptq", "fp8", "compressed-tensors")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What modelling code raises when it is used in a way for which it was not made.
FAILURES = (
    *(RuntimeError, TypeError, KeyError, IndexError, AttributeError, ValueError, AssertionError),
    ArithmeticError,  # divisions by a size of zero
)
MOST_LAYERS = 10_000  # more than any model: to look at them would take hours


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Where one layer's attention is in the model, and what it keeps."""

    path: str
    kv_shape: KVShape
    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowedConfig:
    """A decoder of transformers: what our side needs to know of it."""

    architecture: str
    model_class: Any  # a PreTrainedModel
    transformers_config: Any  # its PreTrainedConfig
    dtype: torch.dtype  # the checkpoint's
    vocab_size: int
    default_max_model_len: int
    longest_sequence_tokens: int
    layers: tuple[LayerLayout, ...]
    body_path: str  # of the module that computes hidden states, in the causal language model
    body_output: Any  # what it returns them in
    quantization: Quantization | None = None  # how the checkpoint stores its weights, if not plainly
    widened_from: str | None = None  # a form of few bits that transformers widens while it loads the weights

    @property
    def kv_shapes(self) -> list[KVShape]:
        """Return each layer's (num_kv_heads, key_head_size, value_head_size)."""
        return [layer.kv_shape for layer in self.layers]

    def frequencies(self, max_model_len: int) -> str:
        """Return the rotary frequencies for `max_model_len` as text, for a fingerprint."""
        return rotary_frequencies(self.build("meta", self.dtype), max_model_len)

    def build(self, device: str | torch.device, dtype: torch.dtype) -> Any:
        """Return the model on a device, its parameters not filled."""
        return _build(self.model_class, self.transformers_config, device, dtype)


def read_borrowed_config(directory: Path, architecture: str, *, trust_remote_code: bool) -> BorrowedConfig:
    """Return the BorrowedConfig of a checkpoint directory, having looked at one forward pass without weights.

    Code of the checkpoint runs only if `trust_remote_code` and transformers lacks the architecture. Raises ValueError,
    with the reason, for what cannot be served.
    """
    attention.register()
    with quiet(None):
        model_class, config = _resolve(directory, architecture, trust_remote_code)
        if said := without_effect(getattr(config, "rope_parameters", None) or {}):
            logger.warning("%s: %s", directory / "config.json", said)
        if config.dtype is None:
            config.dtype = unsaid_dtype(directory)
        _refuse_unsupported(architecture, config)
        widened_from, quantization = _take_quantization(architecture, config, directory)
        found = _look(architecture, model_class, config)
        return replace(found, widened_from=widened_from, quantization=quantization)


def _resolve(directory: Path, architecture: str, trust_remote_code: bool) -> tuple[Any, Any]:
    """Return the model's class and its configuration."""
    known = architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not known and hasattr(transformers, architecture):
        _refuse(architecture, "transformers has it, but not as a decoder of text")
    auto_map = {} if known else transformers.PreTrainedConfig.get_config_dict(directory)[0].get("auto_map", {})
    if not known and AUTO_CLASS not in auto_map:
        _refuse(
            architecture,
            f"transformers {transformers.__version__} does not know it; a newer one may (pip install -U transformers)",
        )
    if not known and not trust_remote_code:
        _refuse(architecture, "its modelling code comes with the checkpoint, and --trust-remote-code is not set")
    try:
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=not known, local_files_only=True)
    except (StrictDataclassError, OSError, *FAILURES) as error:
        _refuse(architecture, f"transformers cannot read {directory / 'config.json'}: {line_of(error)}")
    if known:
        return getattr(transformers, architecture), config
    try:
        return get_class_from_dynamic_module(auto_map[AUTO_CLASS], directory, local_files_only=True), config
    except (ImportError, OSError, SyntaxError, *FAILURES) as error:
        _refuse(architecture, f"its modelling code cannot be loaded: {line_of(error)}")


def _refuse_unsupported(architecture: str, config: Any) -> None:
    if config.is_encoder_decoder:
        _refuse(architecture, "it is an encoder and a decoder")
    if config.get_text_config() is not config:
        _refuse(architecture, "it takes more than text")
    num_layers = getattr(config, "num_hidden_layers", None)
    if isinstance(num_layers, int) and num_layers > MOST_LAYERS:
        _refuse(architecture, f"its configuration says {num_layers} layers, and {MOST_LAYERS} are the most")
    if config.dtype not in DTYPES:
        _refuse(architecture, f"its dtype {config.dtype} is not one of float32, bfloat16, float16")


def _take_quantization(architecture: str, config: Any, directory: Path) -> tuple[str | None, Quantization | None]:
    """Return which form transformers widens, and which quantization is read here; the configuration then lacks the
    latter."""
    written = getattr(config, "quantization_config", None)
    if written and written.get("quant_method") in WIDENED:
        return written["quant_method"], None
    try:
        found = read_quantization(directory, written or None)
    except ValueError as error:
        _refuse(architecture, f"{directory / 'config.json'}: {line_of(error)}")
    if found is not None and found.method not in READ_METHODS:
        _refuse(architecture, f"quant_method {found.method!r} is not read in this tier, but {', '.join(READ_METHODS)}")
    if written is not None:
        del config.quantization_config
    return None, found


def _look(architecture: str, model_class: Any, config: Any) -> BorrowedConfig:
    try:
        model = _build(model_class, config, "meta", torch.float32)
        if any(isinstance(module, nn.Conv1d) for module in model.modules()):
            _refuse(architecture, "its layers keep another kind of state than attention (convolution, recurrence)")
        layers, body_path, body_output = _run_on_meta(model, architecture)
    except UnsupportedModelError:
        raise
    except (StrictDataclassError, NotImplementedError, *FAILURES) as error:
        if not getattr(model_class, "_supports_attention_backend", False):
            _refuse(architecture, "its attention does not go through AttentionInterface")
        _refuse(architecture, f"transformers' code of it does not run without weights: {line_of(error)}")
    num_layers = _count(architecture, config, "num_hidden_layers")
    if len(layers) != num_layers:
        _refuse(
            architecture,
            f"attention goes through AttentionInterface {len(layers)} times in its {num_layers} layers: the others keep"
            " another kind of state, or have attention of their own",
        )
    paths = {id(module): path for path, module in model.named_modules()}
    trained_tokens = _count(architecture, config, "max_position_embeddings")
    longest, default = stretched_tokens(config, trained_tokens)
    return BorrowedConfig(
        architecture=architecture,
        model_class=model_class,
        transformers_config=config,
        dtype=config.dtype,
        vocab_size=_count(architecture, config, "vocab_size"),
        default_max_model_len=default,
        longest_sequence_tokens=longest,
        layers=tuple(LayerLayout(paths[id(layer.module)], layer.kv_shape, layer.sliding_window) for layer in layers),
        body_path=body_path,
        body_output=body_output,
    )


def _run_on_meta(model: Any, architecture: str) -> tuple[list[AttentionLayer], str, Any]:
    """Return the attention layers, and of the first module that the causal model calls its path and output's type."""
    make_rotary_static(model, PROBE_TOKENS)
    called: list[tuple[str, Any]] = []

    def remember(path: str, module: nn.Module, arguments: Any, output: Any) -> None:
        called.append((path, type(output)))

    children = [(path, module) for path, module in model.named_modules() if path.count(".") < 2 and path]
    hooks = [module.register_forward_hook(partial(remember, path)) for path, module in children]
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")

    def forward() -> None:
        with torch.inference_mode():
            model(
                input_ids=ids,
                attention_mask=torch.ones(1, PROBE_TOKENS, dtype=torch.int64),  # of the CPU: some code reads it
                position_ids=torch.arange(PROBE_TOKENS, device="meta").unsqueeze(0),
                use_cache=False,
            )

    model.config._attn_implementation = attention.LOOKING
    layers = attention.look_at_layers(model, forward, architecture)
    for hook in hooks:
        hook.remove()
    bodies = [(path, kind) for path, kind in called if issubclass(kind, transformers.utils.ModelOutput)]
    if not bodies:
        _refuse(architecture, "its hidden states are not computed by a model of their own")
    return layers, *bodies[0]


def _build(model_class: Any, config: Any, device: str | torch.device, dtype: torch.dtype) -> Any:
    """Return a model in evaluation mode, on a device, its parameters not filled."""
    with torch.device(device), no_init_weights():
        model = model_class._from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention.PAGED,
            experts_implementation=_experts(device),
        )
    return model.eval()


def _experts(device: str | torch.device) -> str | None:
    """Return how experts are computed: on the meta device in the only way that reads no values."""
    return "batched_mm" if str(device) == "meta" else None


def _count(architecture: str, config: Any, name: str) -> int:
    count = getattr(config, name, None)
    if not isinstance(count, int) or count < 1:
        _refuse(architecture, f"its configuration does not say {name}")
    return count


def _refuse(architecture: str, reason: str) -> NoReturn:
    raise UnsupportedModelError(f"{architecture} is not supported: {reason}")


def line_of(error: BaseException) -> str:
    """Return what an error says, in one line."""
    return " ".join(f"{error}".split())[:300]
