"""A Llama of Hugging Face transformers that trains and generates text on anyflex, unchanged.

Needs `pip install ".[transformers]"`.
"""

from __future__ import annotations

import torch
from anyflex_transformers import NAME
from transformers import LlamaConfig, LlamaForCausalLM

DOCUMENTS = [
    "the quick brown fox jumps over the lazy dog. ",
    "to be or not to be. ",
    "abcabcabc. ",
]
STEPS = 30

torch.manual_seed(0)


def make_model(implementation: str) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config)


# Documents packed into one row: positions that begin again with 0 tell where one ends.
tokens = [torch.tensor(list(text.encode("ascii"))) for text in DOCUMENTS * 4]
row = torch.cat(tokens)[None]
positions = torch.cat([torch.arange(len(each)) for each in tokens])[None]

model, eager = make_model(NAME), make_model("eager")
eager.load_state_dict(model.state_dict())
batch = {"input_ids": row, "position_ids": positions, "labels": row, "use_cache": False}

# A training step of eager attention gives the same loss and the same gradients.
found, expected = model(**batch).loss, eager(**batch).loss
torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
found.backward()
expected.backward()
gradients = [[each.grad for each in one.parameters()] for one in (model, eager)]
torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(STEPS):
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    if step % 10 == 0 or step == STEPS - 1:
        print(f"step {step:2}: loss {loss.item():.3f}")

prompt = torch.tensor([list(b"the quick")])
written = model.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    max_new_tokens=35,
    do_sample=False,
    pad_token_id=0,
)
print(repr(bytes(written[0].tolist()).decode("ascii")))
