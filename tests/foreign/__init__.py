"""The mechanisms on models that are not ours: transformers' GPT-2 and Llama, as they are."""
