"""Places for records. A tier is synchronous, batched, and reads into buffers that it is given."""
