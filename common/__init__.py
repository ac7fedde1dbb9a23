import os

# Idle threads of OpenMP sleep instead of spinning, which on busy cores makes a run ten times slower. libgomp
# reads this when torch is loaded. The user's own value wins.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
