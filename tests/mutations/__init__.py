"""Small changes of the code that tests must notice; `scripts/mutants` tries them."""
