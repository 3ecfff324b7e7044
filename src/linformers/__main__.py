"""``python -m linformers``, which ``torchrun -m linformers`` needs."""

from linformers.cli import main

if __name__ == "__main__":
    main()
