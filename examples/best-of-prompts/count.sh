#!/bin/sh
# Prints how many items there are: "1 item", "2 items".
printf '%d items\n' "$1"
