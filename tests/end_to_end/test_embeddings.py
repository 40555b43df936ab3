"""Vectors through all processes: an encoder's server, and a decoder that embeds while it generates."""

import asyncio
import json
from pathlib import Path

import numpy as np
import openai
import pytest
import torch
import transformers

from octavo import LLM
from tests.fakes.checkpoints import randomize
from tests.fakes.commands import ENGINE_FLAGS, tiny_checkpoint
from tests.fakes.model_directories import VOCAB_SIZE, text_ids
from tests.fakes.octavo_server import running_server

TEXTS = ["hello", "the quick brown fox", "x", "Grüße, 世界 😀"] * 5


@torch.inference_mode()
def vectors_of(directory: Path, texts: list[str], *, takes_last: bool) -> np.ndarray:
    """Return the vectors that transformers and plain arithmetic make."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    hidden = [model(input_ids=torch.tensor([text_ids(text)])).last_hidden_state[0] for text in texts]
    vectors_NE = torch.stack([each[-1] if takes_last else each.mean(0) for each in hidden])
    return (vectors_NE / vectors_NE.norm(dim=1, keepdim=True)).numpy()


def tiny_encoder(directory: Path) -> Path:
    """Write a random BERT, with a tokenizer that spells byte by byte, as sentence-transformers lays it out."""
    tiny_checkpoint(directory)
    (directory / "model.safetensors").unlink()
    (directory / "generation_config.json").unlink()
    config = transformers.BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model = transformers.BertModel(config)
    randomize(model, seed=0)
    model.save_pretrained(directory)
    modules = [{"type": f"sentence_transformers.models.{name}", "path": name} for name in ("Pooling", "Normalize")]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "Pooling").mkdir()
    (directory / "Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return directory


def test_a_server_of_an_encoder(tmp_path: Path) -> None:
    directory = tiny_encoder(tmp_path / "encoder")
    expected = vectors_of(directory, TEXTS, takes_last=False)
    with running_server(tmp_path, "--model", str(directory), "--max-num-seqs", "4") as server:
        client = server.client()
        name = next(iter(client.models.list())).id
        answer = client.embeddings.create(model=name, input=TEXTS)
        with pytest.raises(openai.BadRequestError, match="makes vectors"):
            client.completions.create(model=name, prompt="hi")
        with pytest.raises(openai.BadRequestError, match="maximum context length is 64 tokens"):
            client.embeddings.create(model=name, input="a" * 65)
    np.testing.assert_allclose([entry.embedding for entry in answer.data], expected, atol=1e-5)
    assert answer.usage.prompt_tokens == sum(len(text_ids(text)) for text in TEXTS)


def test_a_decoder_embeds_beside_generation(tmp_path: Path) -> None:
    directory = tiny_checkpoint(tmp_path / "decoder")
    expected = vectors_of(directory, TEXTS, takes_last=True)

    async def both(url: str, name: str) -> tuple[list[list[float]], str, str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            alone = await client.completions.create(model=name, prompt="abc", max_tokens=40, temperature=0)
            text, vectors = await asyncio.gather(
                client.completions.create(model=name, prompt="abc", max_tokens=40, temperature=0),
                client.embeddings.create(model=name, input=TEXTS),
            )
        return [entry.embedding for entry in vectors.data], text.choices[0].text, alone.choices[0].text

    with running_server(tmp_path, "--model", str(directory), *ENGINE_FLAGS) as server:
        name = next(iter(server.client().models.list())).id
        vectors, text, alone = asyncio.run(both(server.url, name))
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    assert text == alone


def test_the_python_api_embeds(tmp_path: Path) -> None:
    directory = tiny_encoder(tmp_path / "encoder")
    with LLM(directory) as llm:
        outputs = llm.embed([*TEXTS, text_ids("hello")], use_tqdm=False)
        [one] = llm.embed("hello")
        with pytest.raises(ValueError, match="makes vectors"):
            llm.generate("hi")
        with pytest.raises(ValueError, match=r"prompts\[1\]: the prompt is empty"):
            llm.embed(["hi", ""])
    expected = vectors_of(directory, [*TEXTS, "hello"], takes_last=False)
    np.testing.assert_allclose([output.outputs.embedding for output in outputs], expected, atol=1e-5)
    assert one.outputs.embedding == pytest.approx(outputs[0].outputs.embedding, abs=1e-6)
    assert one.prompt_token_ids == text_ids("hello")
    assert one.finished
