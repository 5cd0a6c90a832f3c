"""python train.py stage=sft|rm|ppo model=... ; the same as the lightning-rlhf command."""

from lightning_rlhf.__main__ import main

if __name__ == "__main__":
    main()
