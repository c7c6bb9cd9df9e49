"""Every way of generating that is compared with the stock cache, bit for bit.

A mode takes a model and a function that makes caches, and gives tensors: token ids and logits of
every step. Two caches agree when all their tensors are equal.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.cache_utils import DynamicCache

import zoo
from kvplane.integrations.transformers import HybridCache

# from here on models hand position ids to their cache layers, and the stock cache can record
# several calls before a crop; between the ends of the range nobody looked
LATE = Version(transformers.__version__) >= Version("5.24.0")
PROMPT = 21
# more than five windows of the zoo's models
NEW_TOKENS = 44

Made = Callable[[], Any]
Mode = Callable[[Any, Made], list[Tensor]]


def keyword(model: Any) -> str:
    """What this version of transformers calls a cache."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def stock(model: Any) -> Any:
    """The cache that transformers makes by itself."""
    return DynamicCache(config=model.config)


def ours(model: Any, **options: Any) -> HybridCache:
    """A cache of the store, watching the model."""
    return HybridCache(model, **options)


def call(model: Any, cache: Any, ids: Tensor, **facts: Any) -> Tensor:
    """The logits of one forward, `[batch, tokens, vocabulary]`."""
    with torch.no_grad():
        given = {keyword(model): cache, "use_cache": True, **facts}
        return model(input_ids=ids, **given).logits.clone()


def call_part(part: Any, cache: Any, ids: Tensor) -> None:
    """One forward of a decoder without its head."""
    with torch.no_grad():
        part(input_ids=ids, **{keyword(part): cache}, use_cache=True)


def calls(model: Any, cache: Any, ids: Tensor, sizes: list[int]) -> list[Tensor]:
    """The logits of consecutive forwards of these many tokens."""
    parts = torch.split(ids[:, : sum(sizes)], sizes, dim=1)
    return [call(model, cache, part) for part in parts]


def generate(model: Any, cache: Any, ids: Tensor, **options: Any) -> list[Tensor]:
    """Ids and logits of transformers' own generate."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    with torch.no_grad():
        out = model.generate(
            ids,
            **{keyword(model): cache},
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    return [out.sequences, *out.logits]


def steps(model: Any, made: Made) -> list[Tensor]:
    """Given tokens, in calls of several sizes."""
    sizes = [PROMPT, *[1] * 10, 7, *[1] * 22]
    return calls(model, made(), zoo.text(sum(sizes)), sizes)


def greedy(model: Any, made: Made) -> list[Tensor]:
    """The likeliest token, 44 times."""
    return generate(model, made(), zoo.text(PROMPT))


def sampling(model: Any, made: Made) -> list[Tensor]:
    """Drawn tokens, from the same seed."""
    torch.manual_seed(7)
    return generate(model, made(), zoo.text(PROMPT), do_sample=True, top_k=40)


def beams(model: Any, made: Made) -> list[Tensor]:
    """Three beams."""
    return generate(model, made(), zoo.text(PROMPT), num_beams=3)


def prompt_lookup(model: Any, made: Made) -> list[Tensor]:
    """Candidates from the text before: many are rejected."""
    ids = zoo.text(6).repeat(1, 4)
    return generate(model, made(), ids, prompt_lookup_num_tokens=3)


def assistant(model: Any, made: Made) -> list[Tensor]:
    """Candidates from a model that is nearly the same: some are rejected."""
    helper = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for parameter in helper.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += (0.004 * noise).to(parameter.dtype)
    helper.generation_config.num_assistant_tokens = 4
    helper.generation_config.num_assistant_tokens_schedule = "constant"
    return generate(model, made(), zoo.text(PROMPT), assistant_model=helper)


def left_padding(model: Any, made: Made) -> list[Tensor]:
    """Three sequences of 21, 14 and 3 tokens."""
    ids, mask = padded(PROMPT, 14, 3)
    return generate(model, made(), ids, attention_mask=mask)


def padded(*lengths: int) -> tuple[Tensor, Tensor]:
    """Ids and mask of sequences of these lengths, padded on the left."""
    longest = max(lengths)
    ids = zoo.text(longest, batch=len(lengths))
    mask = torch.ones_like(ids)
    for number, length in enumerate(lengths):
        mask[number, : longest - length] = 0
    return ids.masked_fill(mask == 0, 0), mask


def chunked_prefill(model: Any, made: Made) -> list[Tensor]:
    """The prompt in chunks of seven."""
    return generate(model, made(), zoo.text(30), prefill_chunk_size=7)


def two_turns(model: Any, made: Made) -> list[Tensor]:
    """A second prompt goes on from the first answer."""
    cache = made()
    first = generate(model, cache, zoo.text(PROMPT), max_new_tokens=20)
    ids = torch.cat([first[0], zoo.text(11, seed=5)], dim=1)
    # the answer may hold the padding id: said to be text
    mask = torch.ones_like(ids)
    return [*first, *generate(model, cache, ids, max_new_tokens=24, attention_mask=mask)]


def embeddings(model: Any, made: Made) -> list[Tensor]:
    """A prompt of embeddings instead of ids."""
    rows = model.get_input_embeddings()(zoo.text(PROMPT)).detach()
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with torch.no_grad():
        out = model.generate(
            inputs_embeds=rows,
            **{keyword(model): made()},
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    return [out.sequences, *out.logits]


def fork(model: Any, made: Made) -> list[Tensor]:
    """Two copies that go different ways, then the first again."""
    cache = made()
    ids = zoo.text(60)
    found = calls(model, cache, ids, [PROMPT, 1, 1, 1])
    twin = copy.deepcopy(cache)
    for each, seed in ((twin, 8), (cache, 9)):
        found += calls(model, each, zoo.text(20, seed=seed), [1] * 20)
    return found


MODES: dict[str, Mode] = {
    "steps": steps,
    "greedy": greedy,
    "sampling": sampling,
    "beams": beams,
    "prompt_lookup": prompt_lookup,
    "assistant": assistant,
    "left_padding": left_padding,
    "chunked_prefill": chunked_prefill,
    "two_turns": two_turns,
    "embeddings": embeddings,
    "fork": fork,
}
