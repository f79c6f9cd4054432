"""The tpu platform: runs models through XLA, without torch."""
