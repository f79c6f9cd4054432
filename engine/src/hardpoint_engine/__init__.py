"""The reference driver for Hardpoint: scheduler, KV blocks, tokenizer front, LLM class"""
