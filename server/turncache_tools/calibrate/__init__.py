"""``turncache calibrate``: what prefill, host work and transfers cost on a running stack."""
