"""A task for workers, which import it by name: this module, and not those of a test."""


def where(started: str | None = None, wait_for: str | None = None) -> str:
    """Tell which manager runs this, once ``wait_for`` exists."""
    import os
    import time

    if started:
        with open(started, 'w') as file:
            file.write(os.environ['PARSL_WORKER_POOL_ID'] + '\n')
    while wait_for and not os.path.exists(wait_for):
        time.sleep(0.02)
    return os.environ['PARSL_WORKER_POOL_ID']
