"""Text that goes on from prompts, many at a time: `python examples/offline.py [MODEL]`."""

import sys

from octavo import LLM, SamplingParams

prompts = ["The capital of France is", "The first page of a book", "你好"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20)

llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else None)
for output in llm.generate(prompts, sampling_params):
    print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
