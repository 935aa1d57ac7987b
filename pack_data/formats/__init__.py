"""Other people's files: readers and writers, one module a format, none of them needing TensorFlow."""
