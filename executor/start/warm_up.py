"""Work before the first request: kernels are compiled, trial steps run, CUDA graphs are recorded."""

import logging
import time

from torch import Tensor
from tqdm import tqdm

from octavo.executor.models.inputs import StepInputs
from octavo.executor.parallel import TensorParallel
from octavo.executor.step.graphs import DecodeGraphs, batch_sizes, table_widths
from octavo.executor.step.runner import ModelRunner
from octavo.kernels.backend import Compilation
from octavo.protocol.config import Config
from octavo.protocol.messages import SequenceInit, SequenceStep, Step, pack_ids
from octavo.protocol.sampling import Sampling

logger = logging.getLogger(__name__)

WARM_UP_TOKENS = 8
FIRST_START = "compiling kernels, as a first start does: about half a minute"
SLOW_COMPILE_S = 2.0  # a kernel that takes longer was missing in the user's cache


def compile_in_turn(compilation: Compilation, parallel: TensorParallel) -> None:
    """Let rank 0 fill the user's cache before the other ranks read it: each kernel is compiled once."""
    if parallel.rank > 0:
        parallel.wait()
    compile_kernels(compilation)
    if parallel.rank == 0:
        parallel.wait()


def compile_kernels(compilation: Compilation) -> None:
    """Make the calls of the compilation; show a progress bar if stderr is a terminal."""
    is_logged = compilation.is_first
    if is_logged:
        logger.info(FIRST_START)
    with tqdm(compilation.calls, desc="kernels", unit=" kernels", disable=None, leave=False) as calls:
        for name, compile_kernel in calls:
            started_s = time.monotonic()
            compile_kernel()
            calls.set_postfix_str(name)
            if time.monotonic() - started_s > SLOW_COMPILE_S and not is_logged:
                logger.info(FIRST_START)
                is_logged = True


def warm_up(runner: ModelRunner, max_model_len: int) -> None:
    """Run one small prompt and one decode step: kernels are compiled and memory pages touched before any request."""
    num_tokens = max(1, min(WARM_UP_TOKENS, max_model_len - 1))
    prompt, blocks = bytes(4 * num_tokens), pack_ids(range(-(-(num_tokens + 1) // runner.block_size)))
    if not runner.kv_caches:  # an encoder, which makes a vector of the prompt
        init = SequenceInit(sampling=Sampling(max_tokens=0, seed=0), num_prompt_tokens=num_tokens, task="embed")
        runner.run(Step("", "", 1, [SequenceStep(0, 0, prompt, blocks, False, init)]))
        runner.reset()
        return
    sampling = Sampling(max_tokens=2, seed=0, temperature=1.0, top_p=0.5, num_logprobs=1)
    runner.run(Step("", "", 1, [SequenceStep(0, 0, prompt, blocks, True, SequenceInit(sampling, num_tokens))]))
    if num_tokens < max_model_len:
        runner.run(Step("", "", 2, [SequenceStep(0, num_tokens, b"", blocks, True)]))
    runner.reset()


def capture_graphs(runner: ModelRunner, max_num_seqs: int, max_model_len: int) -> None:
    """Record the runner's decode steps; show a progress bar if stderr is a terminal. This compiles the last kernels.

    A model goes without graphs if its code (transformers', or a checkpoint's own) reads values during a step.
    """
    widths = table_widths(max_model_len, runner.block_size)

    def run(inputs: StepInputs) -> Tensor:
        return runner.model.forward(inputs, runner.kv_caches)

    graphs = DecodeGraphs(run, runner.device, batch_sizes(max_num_seqs), widths)
    if not graphs.can_be_recorded():
        logger.warning(
            "no CUDA graphs: this model's code waits for the device in each step; steps are launched without graphs"
        )
        return
    with tqdm(graphs.capture(), "CUDA graphs", len(graphs), unit=" graphs", disable=None, leave=False) as captured:
        for num_seqs, table_blocks in captured:
            captured.set_postfix_str(f"{num_seqs} sequences of {table_blocks} blocks")
    runner.graphs = graphs


def largest_step(config: Config, max_model_len: int, *, generates: bool = True) -> Step:
    """Return the largest step that a scheduler may plan. All its sequences share block 0: its results are useless."""
    num_seqs = config.max_num_seqs
    length, num_longer = divmod(config.max_num_batched_tokens, num_seqs)
    sampling = Sampling(max_tokens=1, seed=0, temperature=1.0, top_p=0.5, num_logprobs=1)
    sequences = []
    for seq_id in range(num_seqs):
        num_tokens = min(length + (seq_id < num_longer), max_model_len)
        prompt, table = bytes(4 * num_tokens), bytes(4 * -(-num_tokens // config.block_size))
        init = SequenceInit(sampling, num_tokens, task="generate" if generates else "embed")
        sequences.append(SequenceStep(seq_id, 0, prompt, table, generates, init))
    return Step("", "", 1, sequences)
