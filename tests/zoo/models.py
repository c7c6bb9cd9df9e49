"""What is in the zoo, and what is not and why."""

from dataclasses import dataclass, field
from typing import Any

SLIDING = "sliding_attention"
FULL = "full_attention"
SSSF = [SLIDING, SLIDING, SLIDING, FULL] * 2

# options every config takes that knows them
COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": 8,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "vocab_size_per_layer_input": 257,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tiny model.

    Args:
        model_type: transformers' name.
        layers: first letters of its layer types as transformers' own helper gives them: Sliding,
            Full, Linear, Conv, Dummy (reads another layer's rows), Hybrid (rows and a state).
        options: beyond `COMMON`.
        parts: options of the nested configs of a composite model.
        since: the first transformers version known to describe it rightly.
        deviation: of the weights.
    """

    model_type: str
    layers: str
    options: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    since: str = "5.17.0"
    deviation: float = 0.08


TINY_VISION = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
MUSE_OPTIONS = {
    "out_hidden_size": 32,
    "projector_hidden_size": 32,
    "image_token_id": 255,
    "video_token_id": 256,
}

# composite models: text is one part of them, and there is no text-only class
COMPOSITES = {
    "muse_glimmer": "MuseGlimmerForConditionalGeneration",
    "muse_spark": "MuseSparkForConditionalGeneration",
}

MODELS: dict[str, Entry] = {
    "muse_glimmer": Entry(
        model_type="muse_glimmer",
        layers="SSSFSSSF",
        parts={"text_config": {}, "vision_config": TINY_VISION},
        options=MUSE_OPTIONS,
    ),
    "afmoe": Entry(model_type="afmoe", layers="SSSFSSSF"),
    "beam": Entry(model_type="beam", layers="SSSSSFSF"),
    "cohere2": Entry(model_type="cohere2", layers="SSSFSSSF"),
    "cohere2_moe": Entry(model_type="cohere2_moe", layers="SSSFSSSF"),
    "cwm": Entry(model_type="cwm", layers="FSSSFSSS"),
    "exaone4": Entry(model_type="exaone4", layers="SSSFSSSF"),
    "exaone_moe": Entry(model_type="exaone_moe", layers="SSSFSSSF"),
    "flint": Entry(model_type="flint", layers="FFSSSFSF"),
    "gemma2": Entry(
        model_type="gemma2", layers="SFSFSFSF", options={"attn_logit_softcapping": 2.0}
    ),
    "gemma3_text": Entry(model_type="gemma3_text", layers="SSSSSFSS"),
    "gemma3n_text": Entry(
        model_type="gemma3n_text",
        layers="SSSFSFDDDD",
        options={
            "num_hidden_layers": 10,
            "num_kv_shared_layers": 4,
            "layer_types": [SLIDING] * 3 + [FULL, SLIDING] * 2 + [FULL, SLIDING, FULL],
        },
    ),
    "gemma4_text": Entry(
        model_type="gemma4_text",
        layers="SSSFSFSF",
        options={
            "global_head_dim": 32,
            "layer_types": [SLIDING] * 3 + [FULL, SLIDING, FULL, SLIDING, FULL],
        },
    ),
    "gemma4_text_shared": Entry(
        model_type="gemma4_text",
        layers="SSSFSDDD",
        options={
            "global_head_dim": 32,
            "num_kv_shared_layers": 3,
            "layer_types": [SLIDING] * 3 + [FULL] + [SLIDING] * 3 + [FULL],
        },
    ),
    "gemma4_unified_text": Entry(
        model_type="gemma4_unified_text",
        layers="SSSSSFSF",
        options={"global_head_dim": 32, "num_global_key_value_heads": 1},
    ),
    "gpt_oss": Entry(model_type="gpt_oss", layers="SFSFSFSF"),
    "granite_swa": Entry(model_type="granite_swa", layers="FSSSFSSS"),
    "granitemoe_swa": Entry(model_type="granitemoe_swa", layers="FSSSFSSS"),
    "kolibri1": Entry(model_type="kolibri1", layers="SSSSFSSS"),
    "laguna": Entry(model_type="laguna", layers="SSSFSSSF", options={"layer_types": SSSF}),
    "lara_mini": Entry(model_type="lara_mini", layers="LSLFSLSL"),
    "lfm2": Entry(
        model_type="lfm2",
        layers="CCFCCFCF",
        options={"layer_types": ["conv", "conv", FULL] * 2 + ["conv", FULL]},
    ),
    "lfm3": Entry(model_type="lfm3", layers="CCFCSCFC"),
    "mellum": Entry(model_type="mellum", layers="SSSFSSSF", options={"layer_types": SSSF}),
    "mimo_v2_flash": Entry(
        model_type="mimo_v2_flash", layers="FSSSSFSS", options={"v_head_dim": 8}
    ),
    "ministral": Entry(model_type="ministral", layers="SSSFSSSF", options={"layer_types": SSSF}),
    "ministral3": Entry(model_type="ministral3", layers="SSSSSSSS"),
    "mistral": Entry(model_type="mistral", layers="SSSSSSSS"),
    "mixtral": Entry(model_type="mixtral", layers="SSSSSSSS"),
    "modernbert-decoder": Entry(
        model_type="modernbert-decoder", layers="FSSFSSFS", options={"local_attention": 16}
    ),
    "muse_spark": Entry(
        model_type="muse_spark",
        layers="SSSFSSSF",
        parts={
            "text_config": {"moe_hidden_size": 32},
            "vision_config": TINY_VISION,
            "audio_config": {
                "hidden_sizes": (8, 8, 16, 16),
                "depths": (1, 1, 1, 1),
                "out_hidden_size": 64,
            },
        },
        options=MUSE_OPTIONS | {"audio_token_id": 254},
    ),
    "olmo3": Entry(model_type="olmo3", layers="SSSFSSSF"),
    "phi3": Entry(model_type="phi3", layers="SSSSSSSS"),
    "phimoe": Entry(model_type="phimoe", layers="SSSSSSSS"),
    "qwen2": Entry(
        model_type="qwen2",
        layers="FFFSSSSS",
        options={"use_sliding_window": True, "max_window_layers": 3},
    ),
    "qwen2_moe": Entry(
        model_type="qwen2_moe",
        layers="SFSFFFFF",
        options={"use_sliding_window": True, "max_window_layers": 3},
    ),
    "qwen3": Entry(
        model_type="qwen3",
        layers="FFFSSSSS",
        options={"use_sliding_window": True, "max_window_layers": 3},
    ),
    "qwen3_next": Entry(model_type="qwen3_next", layers="LLLFLLLF"),
    "recurrent_gemma": Entry(
        model_type="recurrent_gemma",
        layers="LLSLLSLL",
        options={"attention_window_size": 8},
        # 5.17 calls all its layers sliding and replaces methods of the cache it is given
        since="5.24.0",
    ),
    "smollm3": Entry(
        model_type="smollm3",
        layers="SSSFSSSF",
        options={"layer_types": SSSF, "use_sliding_window": True},
    ),
    "starcoder2": Entry(model_type="starcoder2", layers="SSSSSSSS"),
    "vaultgemma": Entry(
        model_type="vaultgemma", layers="SFSFSFSF", options={"attn_logit_softcapping": 2.0}
    ),
}

# causal model classes with sliding layers that the matrix does not run, each with its reason
EXCLUDED: dict[str, str] = {
    "dory": "a looped model: one forward runs its layers several times and keeps copies of cache "
    "layers; refused",
    "dots3_note": "its full layers keep a second cache of indexer keys; refused",
    "dots3_note_text": "the same as dots3_note",
    "gemma3": "the text part is gemma3_text; pictures need a processor",
    "gemma3n": "the text part is gemma3n_text; pictures and sound need a processor",
    "gemma4": "the text part is gemma4_text; pictures and sound need a processor",
    "gemma4_unified": "the text part is gemma4_unified_text; pictures need a processor",
    "inkling_text": "every layer is attention and convolution in one of transformers' own classes; "
    "nothing would be left for the store; refused",
    "inkling2_text": "the same as inkling_text",
    "inkling2_loop_text": "the same as inkling_text",
    "llama4": "chunked attention; refused",
    "llama4_text": "chunked attention; refused",
    "moshi": "speech in and out with two decoders; its text decoder is all sliding like mistral",
}
