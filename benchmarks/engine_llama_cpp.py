"""llama.cpp as a side of `engine.py`, in an interpreter of its own: `pip install llama-cpp-python gguf`.

    python engine_llama_cpp.py FOLDER DTYPE THREADS LONGEST

The model of the folder is written as a GGUF file. Each line of the input is a job, whose requests are all sequences of
one context: a step computes the next tokens of prompts, up to the batch of llama.cpp (2,048 by default), and one of
every other sequence, as its own server does. Tokens are sampled by its own sampler at temperature 1, without
logprobs. A line of the output has the wall and CPU seconds.
"""

from __future__ import annotations

import ctypes
import json
import struct
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import llama_cpp as api
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def read_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the float32 tensors of `model.safetensors`, under the names of GGUF."""
    content = (folder / "model.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    for name, place in json.loads(content[8 : 8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = place["data_offsets"]
        assert place["dtype"] == "F32", place
        tensor = np.frombuffer(content[8 + size :][begin:end], np.float32).reshape(place["shape"])
        if name in WHOLE:
            yield f"{WHOLE[name]}.weight", tensor
        else:
            _, _, layer, rest = name.split(".", 3)
            yield f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight", tensor


def write_gguf(folder: Path, path: Path, dtype: str) -> int:
    """Writes a model of Qwen3's shape; returns the size of its vocabulary."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config.get("rope_theta") or config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, tensor in read_tensors(folder):
        if dtype == "bfloat16" and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return int(config["vocab_size"])


class Model:
    """A model of llama.cpp."""

    def __init__(self, path: Path, threads: int, longest: int) -> None:
        api.llama_log_set(IGNORE, ctypes.c_void_p(0))
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        assert self._model, "llama.cpp does not load the file"
        self._threads, self._longest = threads, longest

    def play(self, prompts: list[list[int]], max_tokens: list[int]) -> tuple[float, float]:
        """Samples all replies; returns the wall and CPU seconds."""
        settings = api.llama_context_default_params()
        settings.n_seq_max = len(prompts)
        settings.n_ctx = len(prompts) * -(-self._longest // 256) * 256
        settings.n_threads = settings.n_threads_batch = self._threads
        settings.kv_unified = len(prompts) <= 16  # a quarter faster up to there, and two to six times slower beyond
        context = api.llama_init_from_model(self._model, settings)
        assert context, "llama.cpp has no room for the sequences"
        room = api.llama_n_batch(context)
        batch = api.llama_batch_init(room, 0, 1)
        samplers = [api.llama_sampler_init_dist(seed) for seed in range(len(prompts))]
        wall, cpu = time.perf_counter(), time.process_time()
        rows = [list(prompt) for prompt in prompts]
        num_read, sampled = [0] * len(prompts), [0] * len(prompts)
        while any(map(int.__lt__, sampled, max_tokens)):
            reads = fill(batch, room, rows, num_read)
            assert api.llama_decode(context, batch) == 0, "llama.cpp cannot compute a step"
            for number, place in reads:
                rows[number].append(api.llama_sampler_sample(samplers[number], context, place))
                sampled[number] += 1
                if sampled[number] == max_tokens[number]:
                    num_read[number] = len(rows[number])
        spent = time.perf_counter() - wall, time.process_time() - cpu
        for sampler in samplers:
            api.llama_sampler_free(sampler)
        api.llama_batch_free(batch)
        api.llama_free(context)
        return spent


IGNORE = api.llama_log_callback(lambda level, text, data: None)


def fill(batch: api.llama_batch, room: int, rows: list[list[int]], num_read: list[int]) -> list[tuple[int, int]]:
    """Fills the batch with what is given and was not read; returns the sequences that have a token to sample, with the
    places of their logits."""
    reads: list[tuple[int, int]] = []
    size = 0
    for number, ids in sorted(enumerate(rows), key=lambda pair: len(pair[1]) - num_read[pair[0]]):
        first, last = num_read[number], min(len(ids), num_read[number] + room - size)
        for position in range(first, last):
            batch.token[size], batch.pos[size] = ids[position], position
            batch.n_seq_id[size], batch.seq_id[size][0] = 1, number
            batch.logits[size] = position == len(ids) - 1
            size += 1
        num_read[number] = last
        if first < last == len(ids):
            reads.append((number, size - 1))
    batch.n_tokens = size
    return reads


def main() -> None:
    """Plays each job of the input."""
    folder, dtype, threads, longest = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model.gguf"
        write_gguf(folder, path, dtype)
        model = Model(path, threads, longest)
        for line in sys.stdin:
            job = json.loads(line)
            print(json.dumps(model.play(job["prompts"], job["max_tokens"])), flush=True)


if __name__ == "__main__":
    main()
