"""The privacy core: guard, exact integer statistics, noise, accounting, claim."""
