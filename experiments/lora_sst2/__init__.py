"""A sentence encoder adapted to SST-2 with LoRA, inside Hugging Face's Trainer.

dpkfc reproduce lora-sst2 --data-dir DATA
"""
