// Command wrap breaks the text on its standard input into lines of at most 60
// columns.
package main

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

func main() {
	var words []string
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		words = append(words, strings.Fields(in.Text())...)
	}
	for _, line := range Wrap(words, 60) {
		fmt.Println(line)
	}
}

// Wrap joins words into lines of at most width columns. A word that is longer
// than a line is cut.
func Wrap(words []string, width int) []string {
	var lines []string
	line := ""
	for _, word := range words {
		if len(line)+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
