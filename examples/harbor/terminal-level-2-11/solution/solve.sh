#!/bin/sh
awk -F, '$1 == "hana" { s += $2 } END { print s }' valley.csv > total.txt
