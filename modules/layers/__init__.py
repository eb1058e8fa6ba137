"""The layers that models are made of, by kind; `modules` has the public ones by name."""
