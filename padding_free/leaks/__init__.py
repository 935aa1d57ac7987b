"""The isolation check: does each example of a row behave as if it were alone?"""
