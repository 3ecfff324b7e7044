"""One tiny random model of every supported Hugging Face architecture, and inputs for it."""

import copy

import torch
import transformers

N = 13  # the longest input of all of them

TEXT = {
    "vocab_size": 31,
    "hidden_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 17,
    "pad_token_id": 0,
}


def make_config(name):
    match name:
        case "bert":
            return transformers.BertConfig(**TEXT, max_position_embeddings=N)
        case "roberta":  # its positions begin after that of the padding
            return transformers.RobertaConfig(**TEXT, max_position_embeddings=N + 1)
        case "distilbert":
            return transformers.DistilBertConfig(
                vocab_size=31, dim=12, n_layers=3, n_heads=3, hidden_dim=17, max_position_embeddings=N
            )
        case "electra":
            return transformers.ElectraConfig(**TEXT, max_position_embeddings=N, embedding_size=5)
        case "modernbert":
            return transformers.ModernBertConfig(
                **TEXT | {"num_hidden_layers": 4},
                max_position_embeddings=N,
                local_attention=4,
                bos_token_id=1,
                eos_token_id=2,
                cls_token_id=1,
                sep_token_id=2,
            )
        case _:  # 4 x 3 patches and the class token
            return transformers.ViTConfig(
                hidden_size=12,
                num_hidden_layers=3,
                num_attention_heads=3,
                intermediate_size=17,
                image_size=(8, 6),
                patch_size=2,
                num_channels=2,
            )


MODELS = {
    "bert": transformers.BertModel,
    "roberta": transformers.RobertaModel,
    "distilbert": transformers.DistilBertModel,
    "electra": transformers.ElectraModel,
    "modernbert": transformers.ModernBertModel,
    "vit": transformers.ViTModel,
}
NAMES = tuple(MODELS)
TEXT_NAMES = tuple(name for name in NAMES if name != "vit")
HEADS = {
    name: getattr(transformers, f"{model.__name__[:-5]}ForSequenceClassification", None)
    for name, model in MODELS.items()
}
HEADS["vit"] = transformers.ViTForImageClassification


def make(name, head=False):
    """A model in double precision with larger weights than usual, so that attention is far from uniform."""
    torch.manual_seed(5)
    model = (HEADS if head else MODELS)[name](make_config(name)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def pair(name, head=False):
    """The same model twice: one to linearise, one to compare with."""
    model = make(name, head)
    return model, copy.deepcopy(model)


def inputs(name, n=N, lengths=None):
    """One batch of two, with a padding mask if ``lengths`` are given."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 2, 8, 6, dtype=torch.float64)}
    batch = {"input_ids": torch.randint(3, 31, (2, n))}
    if lengths is not None:
        batch["attention_mask"] = (torch.arange(n) < torch.tensor(lengths)[:, None]).long()
    return batch


def assert_same_gradients(model, original, batch):
    """The gradients of all parameters of the original, for a random combination of the first token's features."""
    weight = torch.randn(12, dtype=torch.float64)
    for each in (model, original):
        (each(**batch).last_hidden_state[:, 0] * weight).sum().backward()
    gradients = dict(model.named_parameters())
    for key, parameter in original.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[key].grad, parameter.grad, rtol=1e-8, atol=1e-9)
