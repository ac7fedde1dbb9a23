"""`python -m step01_single_gpu.memory_model`: what a training step would hold in memory."""

import sys

from step01_single_gpu.memory_model.prediction import main

sys.exit(main())
