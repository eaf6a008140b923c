"""What executes: admission, batches, model instances and their pool, the rate limiter, the backend interface."""
