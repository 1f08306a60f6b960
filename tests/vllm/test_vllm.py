"""vLLM writes what `generate` writes, token for token. Its environment is its own: `make test-vllm`."""

import asyncio
import os
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # faster: models run in this process, but for the server's

import pytest
import torch
from models import build, tokens
from openai import OpenAI
from speakers import folder
from vllm import LLM, AsyncEngineArgs, EngineArgs, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.engine.async_llm import AsyncLLM

from runningtensor.serve.vllm.model import RunningTensorForVLLM

WRITTEN = 40
LENGTHS = (1, 2, 3, 63, 64, 65, 130, 1, 300, 17)  # below, at and above a chunk; more than are written at a time
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 6,
    "kv_cache_memory_bytes": 2**25,
    "skip_tokenizer_init": True,
}
IN_PIECES = {"max_num_batched_tokens": 48}  # of prompts, between tokens of others


def saved(path, kind, **changes):
    model = build(kind, torch.float32, head_dim=32, **changes)  # vLLM's attention on a CPU knows no narrower heads
    model.save_pretrained(path)
    return model


@contextmanager
def running(path, **options):
    try:
        yield LLM(str(path), **OPTIONS | options)
    finally:
        cleanup_dist_env_and_memory()


def prompts(*lengths):
    return [tokens(length, seed=i).tolist() for i, length in enumerate(lengths)]


def greedy(count=WRITTEN):
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)


def alone(model, prompt, count=WRITTEN):
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return ids[0, len(prompt) :].tolist()


def together(llm, prompts):
    """What is written, and how much of each prompt had been read before."""
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(), use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers], [answer.num_cached_tokens for answer in answers]


@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        ("order 2", {"tie_word_embeddings": True, "projection": "linear", "conv_size": 1, "delta": False}, {}),
        ("order 3", {}, {}),
        ("order 3", {"query_skip": False, "projection": "conconly", "forget": "none"}, IN_PIECES),
        ("order 4", {"conv_size": 7}, IN_PIECES | {"enable_prefix_caching": False}),
        ("hybrid", {}, {"enable_prefix_caching": False}),
        ("hybrid", {}, IN_PIECES),
    ],
)
def test_prompts_of_all_lengths_are_answered_as_each_alone(kind, changes, options, tmp_path):
    model = saved(tmp_path, kind, **changes)
    asked = prompts(*LENGTHS)
    expected = [alone(model, prompt) for prompt in asked]
    with running(tmp_path, **options) as llm:
        assert together(llm, asked[-1:])[0] == expected[-1:]
        for _ in range(2):  # the second time pages hold what the first has left
            assert together(llm, asked)[0] == expected


@pytest.mark.parametrize("kind", ("order 3", "hybrid"))
def test_a_beginning_that_was_read_is_not_read_again(kind, tmp_path):
    model = saved(tmp_path, kind)
    begin, *ends = prompts(256, 1, 40, 200)
    with running(tmp_path, **IN_PIECES) as llm:
        together(llm, [begin + ends[0]])
        answers, cached = together(llm, [begin + end for end in ends])
    assert min(cached) >= 128
    assert answers == [alone(model, begin + end) for end in ends]


def test_a_text_that_is_given_up_for_want_of_memory_is_begun_anew(tmp_path):
    model = saved(tmp_path, "hybrid")
    asked = prompts(*[120] * 6)
    with running(tmp_path, kv_cache_memory_bytes=2**20, disable_log_stats=False) as llm:
        answers, _ = together(llm, asked)
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    assert counts["vllm:num_preemptions"] > 0
    assert answers == [alone(model, prompt) for prompt in asked]


@pytest.mark.parametrize("kind", ("order 3", "hybrid"))
def test_requests_join_while_others_are_written(kind, tmp_path):
    model = saved(tmp_path, kind)
    asked, count = prompts(5, 1, 100, 70), 400
    joined = []  # how much of the one before had been written

    async def answer(engine, i):
        """Streamed; the next is asked when this one has begun."""
        written, following = [], None
        async for output in engine.generate({"prompt_token_ids": asked[i]}, greedy(count), str(i)):
            written = list(output.outputs[0].token_ids)
            if following is None and len(written) >= 5 and i + 1 < len(asked):
                joined.append(len(written))
                following = asyncio.ensure_future(answer(engine, i + 1))
        return [written, *(await following if following else [])]

    async def answers():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path), **OPTIONS | IN_PIECES))
        try:
            return await answer(engine, 0)
        finally:
            engine.shutdown()

    assert asyncio.run(answers()) == [alone(model, prompt, count) for prompt in asked]
    assert len(joined) == 3 and max(joined) < count // 2


def test_the_server_streams_what_generate_writes(tmp_path):
    model, words = folder(tmp_path, loaded=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    options = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory-bytes", str(2**25))
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path), *options)
    # Not from here: what lies in a checkout would hide the entry points of what is installed.
    server = subprocess.Popen((*command, "--port", url.rpartition(":")[2]), cwd=tmp_path)
    try:
        for _ in range(120):
            time.sleep(1)
            assert server.poll() is None
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                continue
        client = OpenAI(base_url=f"{url}/v1", api_key="none")

        def streamed(prompt):
            chunks = client.completions.create(
                model=str(tmp_path), prompt=prompt, max_tokens=WRITTEN, temperature=0, stream=True
            )
            return [chunk.choices[0].text for chunk in chunks]

        asked = ["a", "once upon a time", "the end " * 20, "xyz"]
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(streamed, asked))
    finally:
        server.terminate()
        server.wait()
    assert min(map(len, answers)) > 10
    expected = [words.decode(alone(model, words(prompt).input_ids)) for prompt in asked]
    assert ["".join(chunks) for chunks in answers] == expected


@pytest.mark.parametrize(
    ("wrong", "changes", "options"),
    [
        ("mixer must be 'running_tensor'.*'gla'", {"mixer": "gla", "mixer_options": {"num_heads": 2}}, {}),
        ("tensor_parallel_size must be 1.*2", {}, {"tensor_parallel_size": 2}),
        ("quantization must be None.*'fp8'", {}, {"quantization": "fp8", "dtype": "bfloat16"}),
        (
            "speculative_config must be None",
            {},
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
        ),
    ],
)
def test_what_cannot_be_done_is_refused(wrong, changes, options, tmp_path):
    saved(tmp_path, "order 3", **changes)
    config = EngineArgs(str(tmp_path), **OPTIONS | options).create_engine_config()
    with pytest.raises(ValueError, match=wrong):
        RunningTensorForVLLM(vllm_config=config)
