"""The encoder-decoders that the laws are tested with."""

VARIANTS = {
    "plain": {},
    "sharing none": {"parameter_sharing": "none"},
    "mean": {"method": "mean"},
    "post-norm, no mixing": {"norm": "post", "local_kernel": 0},
    "windowed encoder": {"local_window": 3},
    "full": {"attention": "full"},
    "no self-attention": {"attention": "none"},
    "full cross-attention": {"cross_attention": "full"},
    "full cross-attention, sharing none": {"cross_attention": "full", "parameter_sharing": "none"},
    "slots of the source only": {"attention": "full", "cross_attention": "linformer"},
    "slots of the source only, sharing kv": {
        "attention": "none",
        "cross_attention": "linformer",
        "parameter_sharing": "kv",
    },
    "content": {"method": "content", "parameter_sharing": "none"},
    "opened": {"method": "mean", "open_slots": 2},
    "reversible": {"reversible": True},
    "C2": {"checkpoint_level": "C2"},
    "rotary": {"positions": "rotary", "dim_d": 4},
    "narrow embeddings": {"enc_emb_dim": 7, "dec_emb_dim": 5},
    "inner width": {"ff_intermediate": 8, "dim_d": 3},
}
