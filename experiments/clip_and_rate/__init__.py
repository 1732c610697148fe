"""Does DP-KFC free the learning rate from the clip? Figure 10 of the paper on small digits.

dpkfc reproduce clip-and-rate
python -m experiments.clip_and_rate --out runs/clip-and-rate.jsonl
"""
