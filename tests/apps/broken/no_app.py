"""Has no app in it."""

VALUE = 42
