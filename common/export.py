"""`python -m common.export RUN OUT`: make a Hugging Face folder of a run's newest checkpoint."""

from common.weights.export import main

if __name__ == "__main__":
    raise SystemExit(main())
