"""`python -m ray_jobs`: the command line without its console script."""

from ray_jobs.cli import main

main()
