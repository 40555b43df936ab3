"""Answers to conversations, by the model's own chat template: `python examples/chat.py [MODEL]`."""

import sys

from octavo import LLM, SamplingParams

conversations = [
    [{"role": "system", "content": "Answer with one word."}, {"role": "user", "content": "The capital of France?"}],
    [{"role": "user", "content": "Name three colours."}],
]

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for output in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=32)):
        answer = output.outputs[0]
        print(f"{answer.text!r} ({answer.finish_reason}, {len(answer.token_ids)} tokens)")
