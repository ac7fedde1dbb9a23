"""A known-wrong variant of stretched rotary embeddings: see tests/unit/test_transformers.py."""

from tests.mutants.patches.mutants import Mutants

MUTANTS = Mutants(r"""
@ common.latent_attention:LatentAttention.forward
# With DeepSeek-V3's numbers tables stay as long as they are, and all of YaRN's sharpness is in the scores
mscale forgotten: if self.score_scale != 1: => if False:
""")
