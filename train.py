"""python train.py stage=sft|rm|ppo model=... ; the same as the lightning-rlhf command."""

from lightning_rlhf.__main__ import main

# Hydra's shell completion completes for scripts that hold its @hydra.main, which is in cli/main.py.

if __name__ == "__main__":
    main()
