"""The bugs that the lessons' bug hunts are about (exercise 4 of each step), as their answers name them."""

from tests.mutants.patches.mutants import Mutants

HUNTS = Mutants(r"""
@ step01_single_gpu.train:train_step
# Each micro-batch's loss is the mean of its own tokens, and the record shows the mean of these
hunt of step 1: / batches.target_tokens => / targets.numel()
hunt of step 1: loss += share.detach() => loss += share.detach() / config.accumulation_steps
@ step02_data_parallel.train:train_step
hunt of step 2: mesh.dp, mesh.device => device=mesh.device
@ step03_zero.unit:Unit.start_over
hunt of step 3: self.gathering = self.bucket => self.bucket
@ step03_zero.unit:Unit.__init__
# ... which is set once
hunt of step 3: self.start_over() => self.gathering = None; …
@ step04_tensor_parallel.train:apply_tensor_parallel
hunt of step 4: group=mesh.tp => group=mesh.dp
@ step05_pipeline.train:train_step
hunt of step 5: batches.micro_batch(step, index, => batches.micro_batch(step, forwards % 4,
# ... where a counter has been put before
hunt of step 5: def forward( => forwards = -1\n\n    …
hunt of step 5: if stage.has_embedding or => nonlocal forwards\n        forwards += 1\n        …
@ step06_context_parallel.train:train_step
hunt of step 6: positions_of(config, mesh) => torch.arange(config.rank_seq_len)
@ step07_expert_parallel.expert_parallel:TokenDispatcher.back
hunt of step 7: inverse(self.order) => self.order
@ step08_5d.fused:HeadAndLoss.forward
hunt of step 8: if self.split: => if False:
""")
