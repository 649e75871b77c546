"""The train job: packs of stored hidden states -> a draft, in a Ray Train worker group; see `job.run_training`."""
