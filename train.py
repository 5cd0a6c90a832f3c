"""python train.py stage=sft|rm|ppo model=... ; the same as the lightning-rlhf command."""

from lightning_rlhf.cli.main import main

if __name__ == "__main__":
    main()
